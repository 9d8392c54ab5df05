-- Entries of the queues that are no unfinished job's own.
-- ARGV  2 '1': drop them  3.. queue, entry, id in turn. Answers id and what is wrong, in turn.
local found = {}
for i = 3, #ARGV, 3 do
  local queue, entry, id = tonumber(ARGV[i]), ARGV[i + 1], ARGV[i + 2]
  local job = read(id)
  local own = job.status and not over(job) and job.entry == entry and job.queue == queue
  if not own and redis.call('XRANGE', queues[queue], entry, entry)[1] then
    found[#found + 1] = id
    found[#found + 1] = 'has an entry ' .. entry .. ' in queue ' .. queue .. ' that is not its own'
    if ARGV[2] == '1' then drop(queue, entry) end
  end
end
return found
