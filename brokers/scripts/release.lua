-- ARGV  4 id  5 lease  6 reason  7 '1': the attempt does not count
local id, lease = ARGV[4], ARGV[5]
local job = read(id)
if not holds(job, lease) then return 'lost:' .. (job.status or 'gone') end
return requeue(id, job, ARGV[6], ARGV[7] == '1')
