-- A dead letter is forgotten, with prompt and tokens; unless somebody has queued the job again.
-- ARGV  2 id  3 its entry among the dead. Answers 1 if its record went, too.
local id, entry = ARGV[2], ARGV[3]
local status = read(id).status
redis.call('XDEL', dead_key, entry)
if status and status ~= STATE.failed then return 0 end
redis.call('DEL', job_key(id), log_key(id), tombstone_key(id))
return 1
