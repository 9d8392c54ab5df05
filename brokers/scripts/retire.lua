-- ARGV  2 worker. Its consumers go only when they own nothing: DELCONSUMER would lose what is pending.
for i = 0, #queues do
  local pending = redis.pcall('XPENDING', queues[i], GROUP, '-', '+', '1', ARGV[2])
  if not pending.err and #pending > 0 then return 0 end
end
for i = 0, #queues do redis.pcall('XGROUP', 'DELCONSUMER', queues[i], GROUP, ARGV[2]) end
return 1
