-- ARGV  2 id  3 id of its input  4 milliseconds until its window is over  5 owner  6.. field, value
-- Answers ok, or nofile if the input is gone. The input is kept as long as the batch may need it.
local id, input, window = ARGV[2], file_key(ARGV[3]), tonumber(ARGV[4])
local SLACK = 3600000 -- to write down, when the window is over, what was not answered
if redis.call('EXISTS', input) == 0 then return 'nofile' end
local at = now()
local needed = at + window + SLACK
if redis.call('PTTL', input) < window + SLACK then
  redis.call('PEXPIREAT', input, needed)
  redis.call('HSET', input, 'expires_at', math.floor(needed / 1000))
end
redis.call('HSET', batch_key(id), 'id', id, 'input_file_id', ARGV[3], 'status', BATCH.validating,
  'created_at', math.floor(at / 1000), 'expires_at', math.floor((at + window) / 1000), 'owner', ARGV[5], unpack(ARGV, 6))
redis.call('ZADD', batches_key, at, id)
redis.call('ZADD', open_batches_key, at, ARGV[5] .. '/' .. id)
return 'ok'
