-- A new key, under a name that no other has.
-- ARGV  2 SHA-256 of its secret  3 its record. Answers 1, or 0 if the name is taken.
local keys, digest, record = prefix .. 'keys', ARGV[2], ARGV[3]
if redis.call('HGET', keys, digest) == record then return 1 end
local name = cjson.decode(record).name
for _, other in ipairs(redis.call('HVALS', keys)) do
  other = cjson.decode(other)
  if other.name == name or other.id == name then return 0 end
end
redis.call('HSET', keys, digest, record)
return 1
