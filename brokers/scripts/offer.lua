-- A decode worker's credits: those that it lists already get other scores, and new ones are listed.
-- ARGV  2 number of listed ones  3.. score, credit in turn: first of these, then of new ones. Answers how many are new.
local first = 3 + 2 * ARGV[2]
if first > 3 then redis.call('ZADD', credits_key, 'XX', unpack(ARGV, 3, first - 1)) end -- one that was taken must not come back
if first > #ARGV then return 0 end
redis.call('ZADD', credits_key, unpack(ARGV, first))
if redis.call('EXISTS', line_key) == 1 then wake() end
return (#ARGV - first + 1) / 2
