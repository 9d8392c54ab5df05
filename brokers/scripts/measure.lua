-- All that a scrape asks for, at one moment. Reads only.
-- ARGV  2.. facts to tell of each worker
-- Answers the counters (field, value in turn), of each queue its waiting jobs, its held ones and the age of the oldest that
-- waits in milliseconds, credits, dead letters, and each worker's facts.
local LOOKED_AT = 1024 -- entries of a queue: a script holds up everybody

-- Entries stand in the order in which their jobs began to wait, those that are held among them. Where more of those
-- come first than are looked at, the last one looked at is no younger than the oldest that waits.
local function oldest(queue, held)
  local entry
  for _, found in ipairs(redis.call('XRANGE', queues[queue], '-', '+', 'COUNT', math.min(held + 1, LOOKED_AT))) do
    entry = found
    if redis.call('ZSCORE', line_key, entry[2][2]) then break end
  end
  return entry and math.max(now() - string.match(entry[1], '^%d+'), 0) or 0
end

local waits, workers = {}, {}
for queue = 0, #queues do
  local pending = redis.pcall('XPENDING', queues[queue], GROUP) -- no group, no pending entry
  local held = tonumber(pending[1]) or 0
  local waiting = math.max(redis.call('XLEN', queues[queue]) - held, 0)
  waits[#waits + 1] = {waiting, held, waiting > 0 and oldest(queue, held) or 0}
end
for _, worker in ipairs(redis.call('SMEMBERS', prefix .. 'workers')) do
  workers[#workers + 1] = redis.call('HMGET', worker_key(worker), unpack(ARGV, 2))
end
return {redis.call('HGETALL', metrics_key), waits, redis.call('ZCARD', credits_key), redis.call('XLEN', dead_key), workers}
