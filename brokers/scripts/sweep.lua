-- Entries that nobody renewed for a lease: their holders are gone. By any process, every third of a lease.
-- ARGV  4 lease in milliseconds. Answers <id>:<outcome> of each.
local outcomes = {}
for i = 0, #queues do
  local pending = redis.pcall('XPENDING', queues[i], GROUP, 'IDLE', ARGV[4], '-', '+', '64')
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
        outcomes[#outcomes + 1] = id .. ':' .. requeue(id, job, 'lease of ' .. owner .. ' ran out', false)
      end
    end
  end
end
return outcomes
