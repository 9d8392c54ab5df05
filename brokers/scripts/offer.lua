-- A decode worker's places: the credits that it lists already get their new scores, and new ones are listed.
-- A score is the number of places that will be in use when its turn comes: so the emptiest worker is fed first, also when several
-- jobs are given out before it hears of any.
-- ARGV  2 worker  3 places in use  4 number of listed ones  5.. their nonces, then those of new ones
local worker, busy, listed = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local function score(condition, first, last)
  local members = {}
  for i = first, last do
    members[#members + 1] = busy + i - 5
    members[#members + 1] = worker .. '/' .. ARGV[i]
  end
  if #members > 0 then redis.call('ZADD', credits_key, condition, unpack(members)) end
end

score('XX', 5, 4 + listed) -- one that was taken meanwhile must not come back to life
score('CH', 5 + listed, #ARGV)
if #ARGV >= 5 + listed and redis.call('EXISTS', line_key) == 1 then wake() end
return #ARGV - 4 - listed
