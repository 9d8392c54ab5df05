-- ARGV  4 worker  5 state. Only if the worker is still known: a hash that has expired must not come back without an expiry.
if redis.call('EXISTS', worker_key(ARGV[4])) == 0 then return 0 end
redis.call('HSET', worker_key(ARGV[4]), 'state', ARGV[5])
return 1
