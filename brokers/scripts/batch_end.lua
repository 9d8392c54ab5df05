-- A batch is over: its results can be seen, and it goes in time.
-- ARGV  2 id  3 lease  4 status  5 errors, JSON  6 milliseconds that results are kept, and the batch  7 output file
--       8 its bytes  9 error file  10 its bytes. A file without bytes is none. Answers ok or lost.
local id, key, kept = ARGV[2], batch_key(ARGV[2]), tonumber(ARGV[6])
local found = redis.call('HMGET', key, 'lease', 'owner')
if found[1] ~= ARGV[3] then return 'lost' end
for place, kind in pairs({[7] = 'output', [9] = 'error'}) do
  if ARGV[place + 1] ~= '0' then
    add_file(ARGV[place], found[2], 'batch_output', id .. '_' .. kind .. '.jsonl', ARGV[place + 1], kept)
    redis.call('HSET', key, kind .. '_file_id', ARGV[place])
  end
end
redis.call('HSET', key, 'status', ARGV[4], ARGV[4] .. '_at', math.floor(now() / 1000), 'errors', ARGV[5], 'lease', '')
redis.call('PEXPIRE', key, kept)
redis.call('ZREM', open_batches_key, found[2] .. '/' .. id)
return 'ok'
