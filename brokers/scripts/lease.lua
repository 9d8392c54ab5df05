-- ARGV  2 worker  3 random part of the new lease ids  4 jobs at most  5 tokens of them together, if it is more than one
--       6 '1': the worker has others in hand  7 '1': the tokens bound a single job, too
-- Jobs, and a credit for each. Without any, the answer holds the wake mark to wait from, so that no wake-up is lost.
-- Answers ok, and of each job its id, lease, attempt, credit, endpoint, request and length of its log; or none, or alone if the
-- next one is for empty hands only, and the mark.
local worker, random, most, tokens, others = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1'
local short = ARGV[7] == '1'

-- No more than its share: who is idle could begin at once.
if most > 1 then
  most = math.max(1, math.min(most, math.floor(redis.call('ZCARD', line_key) / redis.call('SCARD', prefix .. 'workers'))))
end

-- Of a decode worker that lives: where the KV cache is to go stands in what it has told of itself.
local function next_credit()
  repeat
    local credit = redis.call('ZRANGE', credits_key, 0, 0)[1]
    local endpoint = credit and redis.call('HGET', worker_key(worker_of(credit) or ''), 'endpoint')
    if not credit or endpoint then return credit, endpoint end
    redis.call('ZREM', credits_key, credit)
  until false
end

-- A job of low priority leaves a decode worker's last place to others, unless that worker has nothing to do: otherwise a batch
-- would fill all places, and whoever waits for an answer had to wait until one of its jobs ends.
local function spares(credit)
  if tonumber(redis.call('ZSCORE', credits_key, credit)) == 0 then return true end
  local free = 0
  for _, other in ipairs(redis.call('ZRANGE', credits_key, 0, -1)) do
    if worker_of(other) == worker_of(credit) then free = free + 1 end
  end
  return free > 1
end

local answer, taken, no = {'ok'}, 0, 'none'

-- What was begun before is taken alone: if it ends its workers, it is not to use up the attempts of others with its own.
local function joins(job)
  tokens = tokens - job.length
  if job.attempt > 0 then return taken == 0 and not others end
  return tokens >= 0 or taken == 0 and not short
end

-- All that is read of a job.
local function look(id)
  local job, known = read(id), redis.call('HMGET', job_key(id), 'request', 'timeline')
  job.request, job.timeline, job.tokens = known[1], known[2], redis.call('XLEN', log_key(id))
  return job
end

local function take(id, job, credit, endpoint)
  taken = taken + 1
  local lease = worker .. '#' .. random .. '-' .. taken
  redis.call('ZREM', credits_key, credit)
  redis.call('HSET', tenants_key, 'round', math.max(job.turn, tonumber(redis.call('HGET', tenants_key, 'round') or 0)))
  step_out(id, job)
  note_owner(id, job, lease)
  tally('attempts', 1)
  redis.call('HSET', job_key(id), 'status', STATE.prefilling, 'attempt', job.attempt + 1, 'lease', lease,
    'timeline', with_line(job.timeline, STATE.prefilling, worker))
  for _, fact in ipairs({id, lease, job.attempt + 1, credit, endpoint, job.request, job.tokens}) do
    answer[#answer + 1] = fact
  end
  if job.attempt > 0 then most = taken end
end

for try = 1, 64 do -- bounded: a script holds up everybody
  local credit, endpoint = next_credit()
  local id = credit and redis.call('ZRANGE', line_key, 0, 0)[1]
  if not id then break end
  local whole, job = pcall(look, id)
  if not whole then -- somebody has made something else of its record, or of its log
    if taken > 0 then break end -- what was taken must be told
    error(job, 0)
  end
  if job.status ~= STATE.queued then step_out(id, job) -- of a record that somebody has deleted
  elseif late(job) then finish(id, job, STATE.expired, 'deadline')
  elseif job.attempt >= MAX_ATTEMPTS then give_up(id, job, 'too many attempts')
  elseif not joins(job) then no = 'alone' break
  elseif job.queue == #queues and not spares(credit) then break
  else take(id, job, credit, endpoint) end
  if taken >= most then break end
end
if taken > 0 then return answer end
local bell = redis.call('XREVRANGE', wake_key, '+', '-', 'COUNT', '1')
return {no, bell[1] and bell[1][1] or '0-0'}
