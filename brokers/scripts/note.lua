-- A line for the job's timeline, from its holder, or from its last one when it is over. ARGV  4 id  5 lease  6 event  7 detail.
-- A record for people: nothing decides on it.
local job = read(ARGV[4])
if not job.status or not (over(job) or holds(job, ARGV[5])) then return 0 end
note(ARGV[4], ARGV[6], ARGV[7])
return 1
