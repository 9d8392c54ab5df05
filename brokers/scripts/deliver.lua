-- The next webhook to try. The try after this one is on the calendar at once: whoever takes a webhook and dies has only delayed
-- it, and a try that fails has nothing to write. When the reply was lost, that was a try, and another webhook is taken.
-- ARGV  2 milliseconds to the second try, to each later one three times as many  3 tries at most  4.. targets that have enough
--       to do: theirs wait
-- Answers id, target, url, number of the try, status, reason, end (ms), tokens of prompt and of answer; or more; or nothing.
local pause, most, busy = tonumber(ARGV[2]), tonumber(ARGV[3]), {}
for i = 4, #ARGV do busy[ARGV[i]] = true end

local function take(target)
  local id = redis.call('ZRANGEBYSCORE', owed_key(target), '-inf', now(), 'LIMIT', '0', '1')[1]
  if not id then return end
  local job = redis.call('HMGET', job_key(id), 'webhook', 'webhook_tries', 'status', 'reason', 'ended', 'length')
  local tries = tonumber(job[2])
  if not tries then redis.call('ZREM', owed_key(target), id) -- of a job that Redis has forgotten, or that goes on
  elseif tries >= most then close_webhook(id, 'given up: nobody knows how the last try went')
  else
    redis.call('ZADD', owed_key(target), now() + pause * 3 ^ tries, id)
    redis.call('HSET', job_key(id), 'webhook_tries', tries + 1)
    return {id, target, job[1], tries + 1, job[3], job[4], job[5], job[6], math.max(redis.call('XLEN', log_key(id)) - 1, 0)}
  end
end

local function look_again(target)
  local first = redis.call('ZRANGE', owed_key(target), 0, 0, 'WITHSCORES')
  if first[1] then redis.call('ZADD', webhooks_key, first[2], target)
  else redis.call('ZREM', webhooks_key, target) end
end

for step = 1, 64 do -- bounded: a script holds up everybody
  local target = redis.call('ZRANGEBYSCORE', webhooks_key, '-inf', now(), 'LIMIT', '0', '1')[1]
  if not target then return {} end
  if busy[target] then redis.call('ZADD', webhooks_key, now() + 100, target)
  else
    local taken = take(target)
    look_again(target)
    if taken then return taken end
  end
end
return {'more'}
