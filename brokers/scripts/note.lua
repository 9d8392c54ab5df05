-- A line for the job's timeline, from its holder; or after its end, for the holder's words may come late.
-- ARGV  2 id  3 lease  4 event  5 detail. A record for people: nothing decides on it.
local id, lease, event, detail = ARGV[2], ARGV[3], ARGV[4], string.gsub(ARGV[5], '%s+', ' ')
local job = read(id)
if not job.status or not (over(job) or holds(job, lease)) then return 0 end
local before = redis.call('HGET', job_key(id), 'timeline') or ''
if string.find(before, ' ' .. event .. ' ' .. detail, 1, true) then return 0 end
note(id, event, detail)
return 1
