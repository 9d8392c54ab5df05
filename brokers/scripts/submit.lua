-- All jobs of a request, or none of them.
-- ARGV  2 queue  3 bound of waiting jobs  4 owner  5 bound of the owner's, 0: none  6 valid until (ms)
--       7 milliseconds to the deadline, 0: none  8 URL of their webhook or ''  9.. id, digest, tokens of the prompt and request of each job
-- Answers ok | exists (all of them) | conflict | late | full or owner_full, and milliseconds after which there may be room
local queue, bound, owner, owner_bound = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local valid_until, lifetime, webhook = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]

local fresh = {}
for i = 9, #ARGV, 4 do
  local known = redis.call('HGET', job_key(ARGV[i]), 'digest')
  if not known then fresh[#fresh + 1] = i elseif known ~= ARGV[i + 1] then return {'conflict'} end
end
if #fresh == 0 then return {'exists'} end
if now() > valid_until then return {'late'} end

-- When one of so many jobs will leave the line, after Little's law: they have waited for half of what waiting takes, on average.
local function patience(waiting)
  local ages, some = 0, redis.call('ZRANDMEMBER', line_key, 8)
  for _, one in ipairs(some) do ages = ages + now() - (redis.call('HGET', job_key(one), 'submitted') or now()) end
  return waiting > 0 and math.floor(2 * ages / #some / waiting) or 0
end
local waiting = redis.call('ZCARD', line_key)
if waiting + #fresh > bound then return {'full', patience(waiting)} end
local owned = tonumber(redis.call('HGET', tenants_key, 'waiting:' .. owner) or 0)
if owner_bound > 0 and owned + #fresh > owner_bound then return {'owner_full', patience(owned)} end

local deadline = lifetime > 0 and now() + lifetime or 0
for _, i in ipairs(fresh) do
  local id, digest, length, request = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  redis.call('DEL', log_key(id))
  local entry, turn = redis.call('XADD', queues[queue], '*', 'job', id), next_turn(queue, owner)
  redis.call('HSET', job_key(id), 'digest', digest, 'request', request, 'status', STATE.queued, 'lease', '', 'attempt', 0,
    'queue', queue, 'entry', entry, 'owner', owner, 'turn', turn, 'length', length,
    'submitted', now(), 'deadline', deadline, 'timeline', with_line(nil, STATE.queued))
  if webhook ~= '' then redis.call('HSET', job_key(id), 'webhook', webhook) end
  line_up(id, {queue = queue, owner = owner, turn = turn, length = length})
  if deadline > 0 then redis.call('ZADD', deadlines_key, deadline, id) end
end
wake()
return {'ok'}
