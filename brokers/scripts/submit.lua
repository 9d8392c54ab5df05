-- ARGV  2 id  3 queue  4 bound of waiting jobs  5 valid until (ms)  6 digest  7 milliseconds to the deadline, 0: none  8 request
local id, queue, bound, valid_until = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local digest, lifetime, request = ARGV[6], tonumber(ARGV[7]), ARGV[8]

local known = redis.call('HMGET', job_key(id), 'digest', 'status')
if known[1] then return {known[1] == digest and 'exists' or 'conflict', known[2]} end
if now() > valid_until then return {'late'} end

local waiting = 0
for i = 0, #queues do
  local pending = redis.pcall('XPENDING', queues[i], GROUP)
  waiting = waiting + redis.call('XLEN', queues[i]) - (pending.err and 0 or pending[1])
end
if waiting >= bound then return {'full', waiting} end

redis.call('DEL', log_key(id))
local entry = redis.call('XADD', queues[queue], '*', 'job', id)
redis.call('HSET', job_key(id), 'digest', digest, 'request', request, 'status', STATE.queued, 'lease', '', 'attempt', 0,
  'queue', queue, 'entry', entry, 'submitted', now(), 'deadline', lifetime > 0 and now() + lifetime or 0)
if lifetime > 0 then redis.call('ZADD', deadlines_key, now() + lifetime, id) end
note(id, STATE.queued)
wake()
return {'ok', STATE.queued}
