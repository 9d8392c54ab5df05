-- Who comes with this key, and may the request go on? Asked for every request, so that a key that was revoked is refused at once.
-- A token bucket for each key that has a rate: full, it has a minute's requests, and it fills as fast as they may come.
-- ARGV  2 SHA-256 of the secret, '' without one  3 requests that this one counts for: 1, or 0
-- Answers open (there are no keys) | unknown | ok or limited; these with the key's record, requests left, milliseconds until the
-- next one may come, milliseconds until all are there again. Repeated because its reply was lost, it counts twice: nobody is hurt.
local keys, digest, cost = prefix .. 'keys', ARGV[2], tonumber(ARGV[3])
local record = redis.call('HGET', keys, digest)
if not record then return {redis.call('EXISTS', keys) == 0 and 'open' or 'unknown'} end
local key, at = cjson.decode(record), now()

local allowed, left, per_ms = true, key.per_minute, key.per_minute / 60000
if key.per_minute > 0 then
  local bucket = prefix .. 'bucket:' .. key.id
  local was = redis.call('HMGET', bucket, 'left', 'at')
  if was[1] then left = math.min(left, was[1] + math.max(0, at - was[2]) * per_ms) end
  allowed = left >= cost
  if allowed and cost > 0 then
    left = left - cost
    redis.call('HSET', bucket, 'left', string.format('%.17g', left), 'at', at)
    redis.call('PEXPIRE', bucket, math.ceil((key.per_minute - left) / per_ms)) -- no bucket is a full one
  end
end
if at - key.used > 60000 then -- to the minute: not every look is a write
  key.used = at
  redis.call('HSET', keys, digest, cjson.encode(key))
end
if key.per_minute == 0 then return {'ok', record, 0, 0, 0} end
return {allowed and 'ok' or 'limited', record, math.floor(left),
  math.ceil(math.max(0, 1 - left) / per_ms), math.ceil((key.per_minute - left) / per_ms)}
