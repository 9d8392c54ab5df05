-- ARGV  2 id. Answers the status that it has now, '' if there is no such batch. Its holder does the rest.
local key = batch_key(ARGV[2])
local status = redis.call('HGET', key, 'status')
if status == BATCH.validating or status == BATCH.in_progress then
  status = BATCH.cancelling
  redis.call('HSET', key, 'status', status, 'cancelling_at', math.floor(now() / 1000))
end
return status or ''
