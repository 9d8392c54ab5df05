-- ARGV  2 worker  3 random part of the new lease id
-- A job and a credit, or neither. On no, the answer holds the wake mark to wait from, so that no wake-up is lost.
local worker, random = ARGV[2], ARGV[3]

local function no(why)
  local bell = redis.call('XREVRANGE', wake_key, '+', '-', 'COUNT', '1')
  return {why, bell[1] and bell[1][1] or '0-0'}
end

-- Of a decode worker that lives: where the KV cache is to go stands in what it has told of itself.
local credit, endpoint
repeat
  credit = redis.call('ZRANGE', credits_key, 0, 0)[1]
  endpoint = credit and redis.call('HGET', worker_key(worker_of(credit) or ''), 'endpoint')
  if credit and not endpoint then redis.call('ZREM', credits_key, credit) end
until endpoint or not credit
if not credit then return no('nocredit') end

-- A job of low priority leaves a decode worker's last place to others, unless that worker has nothing to do: otherwise a batch
-- would fill all places, and whoever waits for an answer had to wait until one of its jobs ends.
local function spares()
  if tonumber(redis.call('ZSCORE', credits_key, credit)) == 0 then return true end
  local free = 0
  for _, other in ipairs(redis.call('ZRANGE', credits_key, 0, -1)) do
    if worker_of(other) == worker_of(credit) then free = free + 1 end
  end
  return free > 1
end

local function take(id)
  local job = read(id)
  if job.status ~= STATE.queued then step_out(id, job) -- of a record that somebody has deleted
  elseif late(job) then finish(id, job, STATE.expired, 'deadline')
  elseif job.attempt >= MAX_ATTEMPTS then give_up(id, job, 'too many attempts')
  elseif job.queue == #queues and not spares() then return no('nocredit')
  else
    local lease = worker .. '#' .. random
    redis.call('ZREM', credits_key, credit)
    redis.call('HSET', tenants_key, 'round', math.max(job.turn, tonumber(redis.call('HGET', tenants_key, 'round') or 0)))
    step_out(id, job)
    note_owner(id, job, lease)
    tally('attempts', 1)
    local known = redis.call('HMGET', job_key(id), 'request', 'timeline')
    redis.call('HSET', job_key(id), 'status', STATE.prefilling, 'attempt', job.attempt + 1, 'lease', lease,
      'timeline', with_line(known[2], STATE.prefilling, worker))
    return {'ok', id, lease, credit, endpoint, known[1], redis.call('XLEN', log_key(id))}
  end
end

for try = 1, 64 do -- bounded: a script holds up everybody
  local first = redis.call('ZRANGE', line_key, 0, 0)[1]
  if not first then break end
  local taken = take(first)
  if taken then return taken end
end
return no('nojob')
