-- The holder of a stopped job has undone its side: phase, and milliseconds since it was asked. First come, first noted.
-- ARGV  2 id  3 phase. A record for people: nothing decides on it.
local id, phase = ARGV[2], ARGV[3]
local record = redis.call('HMGET', job_key(id), 'stop_asked', 'stop_ms', 'reason', 'status')
if not record[1] or record[2] ~= '' then return 0 end
local ms = now() - record[1]
if record[4] == STATE.cancelled then tally('cancels:' .. phase, 1) end
redis.call('HSET', job_key(id), 'stop_phase', phase, 'stop_ms', ms)
redis.call('SET', tombstone_key(id), record[1] .. ' ' .. record[3] .. ' ' .. phase .. ' ' .. ms .. ' ms', 'PX', KEEP_MS)
return 1
