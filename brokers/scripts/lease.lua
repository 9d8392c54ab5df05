-- ARGV  2 worker  3 random part of the new lease id
-- A job and a credit, or neither. On no, the answer holds the wake mark to wait from, so that no wake-up is lost.
local worker, random = ARGV[2], ARGV[3]
local bell = redis.call('XREVRANGE', wake_key, '+', '-', 'COUNT', '1')
local mark = bell[1] and bell[1][1] or '0-0'

local credit
repeat
  local listed = redis.call('ZRANGE', credits_key, 0, 0)
  credit = listed[1]
  if credit and redis.call('EXISTS', worker_key(worker_of(credit) or '')) == 0 then
    redis.call('ZREM', credits_key, credit)
    credit = nil
  end
until credit or not listed[1]
if not credit then return {'nocredit', mark} end

local function take(i, entry, id)
  local job = read(id)
  if not job.status or over(job) or job.entry ~= entry then
    redis.call('XACK', queues[i], GROUP, entry)
    redis.call('XDEL', queues[i], entry)
  elseif job.lease ~= '' then -- delivered anew because the group was made anew: back to its holder
    note_owner(job, job.lease)
  elseif late(job) then finish(id, job, STATE.expired, 'deadline')
  elseif job.attempt >= MAX_ATTEMPTS then give_up(id, job, 'too many attempts')
  else
    local lease = worker .. '#' .. random
    redis.call('ZREM', credits_key, credit)
    redis.call('HSET', job_key(id), 'status', STATE.prefilling, 'attempt', job.attempt + 1, 'lease', lease)
    note(id, STATE.prefilling, worker)
    return {'ok', id, lease, credit, redis.call('HGET', worker_key(worker_of(credit)), 'endpoint') or '',
      redis.call('HGET', job_key(id), 'request'), redis.call('XLEN', log_key(id))}
  end
end

for i = 0, #queues do
  for turn = 1, 64 do -- bounded: a script holds up everybody
    local answer = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', '1', 'STREAMS', queues[i], '>')
    if answer and answer.err then
      if not string.find(answer.err, 'NOGROUP') then return answer end
      redis.call('XGROUP', 'CREATE', queues[i], GROUP, '0', 'MKSTREAM')
    elseif not answer then break
    else
      local entry = answer[1][2][1]
      local taken = take(i, entry[1], entry[2][2])
      if taken then return taken end
    end
  end
end
return {'nojob', mark}
