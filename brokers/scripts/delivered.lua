-- A webhook has arrived, or was given up.
-- ARGV  2 id  3 the end that it told of (ms): the job may have gone on since, and ended anew  4 what the timeline says
local id, ended, said = ARGV[2], ARGV[3], ARGV[4]
local job = redis.call('HMGET', job_key(id), 'ended', 'webhook_tries')
if job[1] ~= ended or not job[2] then return 0 end
close_webhook(id, said)
return 1
