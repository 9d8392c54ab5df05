-- Is everything about these jobs as it must be? Atomic for each job, so that a running system shows no false alarm.
-- ARGV  2 '1': mend what is not  3 milliseconds of a lease  4.. ids. Answers id and what is wrong, in turn.
local mends, lease_ms = ARGV[2] == '1', tonumber(ARGV[3])
local found = {}

local function wrong(id, what, mend)
  found[#found + 1] = id
  found[#found + 1] = what
  if mends then mend() end
  return true
end

local function last_of(id)
  local entry = redis.call('XREVRANGE', log_key(id), '+', '-', 'COUNT', '1')[1]
  return entry and {id = entry[1], ends = entry[2][1] == 'end'}
end

local function in_queue(id, job)
  local entry = job.entry and queues[job.queue] and redis.call('XRANGE', queues[job.queue], job.entry, job.entry)[1]
  return entry and entry[2][2] == id
end

local function audit_log(id, job, last)
  local length = redis.call('XLEN', log_key(id))
  local first = redis.call('XRANGE', log_key(id), '-', '+', 'COUNT', '1')[1]
  -- ids only grow: from 1-0 to n-0 in n entries there is no room for a gap
  if first and (first[1] ~= '1-0' or last.id ~= length .. '-0') then
    return wrong(id, 'its token log has a gap', function()
      redis.call('DEL', log_key(id)) -- nobody may read on over a gap
      if not over(job) then give_up(id, job, 'its token log had a gap') end
    end)
  end
end

local function audit_webhook(id, job)
  local url = redis.call('HGET', job_key(id), 'webhook')
  if not url then return end
  local key = owed_key(target_of(url))
  local owes = over(job) and redis.call('HEXISTS', job_key(id), 'webhook_tries') == 1
  local listed = redis.call('ZSCORE', key, id)
  if owes and not (listed and redis.call('ZSCORE', webhooks_key, target_of(url))) then
    wrong(id, 'owes a webhook, and nobody would see it', function() owe_webhook(id, url) end)
  elseif listed and not owes then
    wrong(id, 'is among the webhooks, and owes none', function() redis.call('ZREM', key, id) end)
  end
end

local function audit_over(id, job, last)
  if job.lease ~= '' then
    wrong(id, 'is over, and somebody holds it', function() redis.call('HSET', job_key(id), 'lease', '') end)
  end
  if in_queue(id, job) then wrong(id, 'is over, and still in a queue', function() drop(job.queue, job.entry) end) end
  if redis.call('ZSCORE', line_key, id) then wrong(id, 'is over, and still in line', function() step_out(id, job) end) end
  if last and not last.ends then
    wrong(id, 'is over, and its log goes on', function()
      reopen(id)
      finish(id, job, job.status, 'mended')
    end)
  end
  for _, key in ipairs({job_key(id), log_key(id)}) do
    if redis.call('PTTL', key) == -1 then
      wrong(id, 'is over, and would be kept for ever', function() redis.call('PEXPIRE', key, KEEP_MS) end)
    end
  end
end

local function audit_owner(id, job)
  local function again(reason) return function() requeue(id, job, reason, 'mended') end end
  local pending = redis.pcall('XPENDING', queues[job.queue], GROUP, job.entry, job.entry, '1')
  local clock = not pending.err and pending[1]
  if job.status == STATE.queued then
    if job.lease ~= '' then return wrong(id, 'waits, and somebody holds it', again('nobody knew who had it')) end
    if clock then return wrong(id, 'waits, and was given to ' .. clock[2], again('nobody knew who had it')) end
    if not redis.call('ZSCORE', line_key, id) then wrong(id, 'waits, and is not in line', function() line_up(id, job) end) end
  elseif redis.call('ZSCORE', line_key, id) then
    return wrong(id, 'is ' .. job.status .. ', and still in line', function() step_out(id, job) end)
  elseif job.lease == '' then return wrong(id, 'is ' .. job.status .. ', and nobody holds it', again('nobody held it'))
  elseif not clock then
    return wrong(id, 'is ' .. job.status .. ', and no lease runs for it', again('its lease did not run'))
  elseif clock[3] > 2 * lease_ms and redis.call('EXISTS', worker_key(worker_of(job.lease))) == 0 then
    return wrong(id, 'is held by ' .. worker_of(job.lease) .. ', which is gone', again('its holder was gone'))
  end
  if job.deadline > 0 and now() > job.deadline + 2 * lease_ms then
    wrong(id, 'is past its deadline', function() finish(id, job, STATE.expired, 'deadline') end)
  end
end

local function audit_open(id, job, last)
  if not in_queue(id, job) then
    return wrong(id, 'is ' .. job.status .. ', and in no queue', function() requeue(id, job, 'it was in no queue', 'mended') end)
  end
  if last and last.ends then
    return wrong(id, 'is ' .. job.status .. ', and its log has ended', function()
      reopen(id)
      give_up(id, job, 'its log had ended')
    end)
  end
  for _, key in ipairs({job_key(id), log_key(id)}) do
    if redis.call('PTTL', key) >= 0 then
      wrong(id, 'is ' .. job.status .. ', and will be forgotten', function() redis.call('PERSIST', key) end)
    end
  end
  audit_owner(id, job)
end

for i = 4, #ARGV do
  local id = ARGV[i]
  local kinds = {redis.call('TYPE', job_key(id)).ok, redis.call('TYPE', log_key(id)).ok}
  local odd = (kinds[1] ~= 'hash' and kinds[1] ~= 'none') or (kinds[2] ~= 'stream' and kinds[2] ~= 'none')
  local job = not odd and read(id)
  if odd then
    wrong(id, 'has a record or a log of another type', function()
      redis.call('DEL', job_key(id), log_key(id))
      step_out(id, {})
    end)
  elseif not job.status then
    if redis.call('ZSCORE', line_key, id) then
      wrong(id, 'is in line, and has no record', function() step_out(id, job) end)
    end
    if redis.call('EXISTS', log_key(id)) == 1 then
      wrong(id, 'has a token log and no record', function() redis.call('DEL', log_key(id)) end)
    end
  else
    local last = last_of(id)
    audit_webhook(id, job)
    if not audit_log(id, job, last) then (over(job) and audit_over or audit_open)(id, job, last) end
  end
end
return found
