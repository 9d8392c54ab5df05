-- Whoever wants to work on a batch gets its lease, if nobody has it.
-- ARGV  2 id  3 new lease  4 milliseconds of it. Answers the batch's fields, or nothing: it is over, or in other hands.
local id = ARGV[2]
local found = redis.call('HMGET', batch_key(id), 'status', 'lease_until')
if not found[1] or BATCH_OVER[found[1]] or tonumber(found[2] or 0) > now() then return {} end
redis.call('HSET', batch_key(id), 'lease', ARGV[3], 'lease_until', now() + ARGV[4])
return redis.call('HGETALL', batch_key(id))
