-- ARGV  2 id  3 lease  4 reason  5 '1': the attempt does not count
local id, lease = ARGV[2], ARGV[3]
local job = read(id)
if not holds(job, lease) then return 'lost:' .. (job.status or 'gone') end
return requeue(id, job, ARGV[4], ARGV[5] == '1' and 'refunded' or 'released')
