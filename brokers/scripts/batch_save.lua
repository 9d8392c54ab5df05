-- Its holder notes how far it is, and keeps the lease. A cancel that came meanwhile stays.
-- ARGV  2 id  3 lease  4 milliseconds of it from now on  5 status, '' if it is the same  6.. field, value
-- Answers the status that it has now and milliseconds until its window is over, or nothing: it has another holder.
local key, lease, status = batch_key(ARGV[2]), ARGV[3], ARGV[5]
local found = redis.call('HMGET', key, 'lease', 'status', 'expires_at')
if found[1] ~= lease then return {} end
if found[2] == BATCH.cancelling or status == '' then status = found[2] end
if status ~= found[2] then redis.call('HSET', key, 'status', status, status .. '_at', math.floor(now() / 1000)) end
redis.call('HSET', key, 'lease_until', now() + ARGV[4], unpack(ARGV, 6))
return {status, found[3] * 1000 - now()}
