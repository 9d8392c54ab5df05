-- Entries that nobody renewed for a lease: their holders are gone. By any process, every third of a lease.
-- Jobs whose deadline has passed are over, whoever has them or has not; the bell tells it to their holders.
-- Credits and consumers of workers that are gone go, too, the latter once they own nothing. A worker that was only silent
-- gets a consumer by its next read, and offers its places anew after KVR_OPEN_SECONDS.
-- Line and queues name the same jobs, unless somebody has deleted one or the other: then each is made anew from the other, and
-- what is noted of tenants from the line.
-- ARGV  2 lease in milliseconds. Answers <id>:<outcome> of each.
local outcomes = {}

-- Of a job that is held: whether its holder lives is seen by the clock, and somebody has destroyed the group that had it.
local function start_clock(id, job, entry)
  local clock = redis.pcall('XPENDING', queues[job.queue], GROUP, entry, entry, '1')
  if clock.err or not clock[1] then note_owner(id, job, job.lease) end
end

for i = 0, #queues do
  local pending = redis.pcall('XPENDING', queues[i], GROUP, 'IDLE', ARGV[2], '-', '+', '64')
  for _, item in ipairs(pending.err and {} or pending) do
    local entry, owner = item[1], item[2]
    local found = redis.call('XRANGE', queues[i], entry, entry)
    if not found[1] then redis.call('XACK', queues[i], GROUP, entry) -- an operator's XDEL
    else
      local id = found[1][2][2]
      local job = read(id)
      if not job.status or over(job) or job.entry ~= entry then
        redis.call('XACK', queues[i], GROUP, entry)
        redis.call('XDEL', queues[i], entry)
      else
        outcomes[#outcomes + 1] = id .. ':' .. requeue(id, job, 'lease of ' .. owner .. ' ran out', 'lease_ran_out')
      end
    end
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', deadlines_key, '-inf', now() - 1, 'LIMIT', '0', '64')) do
  local job = read(id)
  if job.status and not over(job) and late(job) then
    finish(id, job, STATE.expired, 'deadline')
    outcomes[#outcomes + 1] = id .. ':' .. STATE.expired
  else redis.call('ZREM', deadlines_key, id) end -- of a job that Redis has forgotten
end
local waiting = 0
for i = 0, #queues do
  local pending = redis.pcall('XPENDING', queues[i], GROUP)
  waiting = waiting + redis.call('XLEN', queues[i]) - (pending.err and 0 or pending[1])
end
local noted, turns = 0, redis.call('HGETALL', tenants_key)
for i = 1, #turns, 2 do noted = noted + (string.find(turns[i], '^waiting:') and turns[i + 1] or 0) end
local in_line = redis.call('ZCARD', line_key)
if waiting ~= in_line or noted ~= in_line then
  for i = 0, #queues do
    for _, entry in ipairs(redis.call('XRANGE', queues[i], '-', '+')) do
      local id = entry[2][2]
      local job = read(id)
      if not job.status or over(job) or job.entry ~= entry[1] then drop(i, entry[1])
      elseif job.status ~= STATE.queued then start_clock(id, job, entry[1])
      elseif not redis.call('ZSCORE', line_key, id) then line_up(id, job) end
    end
  end
  for _, id in ipairs(redis.call('ZRANGE', line_key, 0, -1)) do
    local job = read(id)
    if job.status ~= STATE.queued then step_out(id, job)
    elseif not redis.call('XRANGE', queues[job.queue], job.entry, job.entry)[1] then
      redis.call('HSET', job_key(id), 'entry', redis.call('XADD', queues[job.queue], '*', 'job', id))
    end
  end
  recount(true)
end
for i = 0, #queues do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', queues[i], GROUP)
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    local name, owned = consumer[2], consumer[4]
    if owned == 0 and redis.call('EXISTS', worker_key(name)) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', queues[i], GROUP, name)
    end
  end
end
for _, credit in ipairs(redis.call('ZRANGE', credits_key, 0, -1)) do
  if redis.call('EXISTS', worker_key(worker_of(credit) or '')) == 0 then redis.call('ZREM', credits_key, credit) end
end
return outcomes
