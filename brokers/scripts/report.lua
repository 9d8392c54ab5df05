-- What a worker has counted since its last report. The same report again, after a lost reply, counts no second time.
-- ARGV  2 worker  3 number of the report  4.. field, increment in turn. Answers 1, or 0 for a repeat.
local key, number = worker_key(ARGV[2]), ARGV[3]
if redis.call('HGET', key, 'reported') == number then return 0 end
if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'reported', number) end -- never without an expiry
for i = 4, #ARGV, 2 do tally(ARGV[i], ARGV[i + 1]) end
return 1
