-- Cancel and deadline, by anyone, in every state.
-- ARGV  2 id  3 end status  4 reason. Answers ok and the phase that it ended, or over and its status, or unknown.
local id, status, reason = ARGV[2], ARGV[3], ARGV[4]
local job = read(id)
if not job.status then return {'unknown'} end
if over(job) then return {'over', job.status} end
local asked = now()
local waits = job.status == STATE.queued
local phase = waits and 'queued' or job.status == STATE.prefilling and 'prefill' or 'decode' -- until its holder knows better
finish(id, job, status, reason)
if waits and status == STATE.cancelled then tally('cancels:queued', 1) end
redis.call('HSET', job_key(id), 'stop_phase', phase, 'stop_asked', asked, 'stop_ms', waits and 0 or '')
redis.call('SET', tombstone_key(id), asked .. ' ' .. reason .. ' ' .. phase .. (waits and ' 0 ms' or ''), 'PX', KEEP_MS)
return {'ok', job.status}
