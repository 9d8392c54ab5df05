-- A decode worker's places: the credits that it lists already get their new score, and new ones are listed.
-- ARGV  2 worker  3 places in use, the score  4 number of new ones  5.. their nonces, then those that are listed
local worker, busy, fresh = ARGV[2], ARGV[3], tonumber(ARGV[4])

local function score(condition, first, last)
  local members = {}
  for i = first, last do
    members[#members + 1] = busy
    members[#members + 1] = worker .. '/' .. ARGV[i]
  end
  if #members > 0 then redis.call('ZADD', credits_key, condition, unpack(members)) end
end

score('XX', 5 + fresh, #ARGV) -- one that was taken meanwhile must not come back to life
score('CH', 5, 4 + fresh)
if fresh > 0 and redis.call('EXISTS', line_key) == 1 then wake() end
return fresh
