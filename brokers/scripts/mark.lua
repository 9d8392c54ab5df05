-- ARGV  2 worker  3 state. Only if the worker is still known: a hash that has expired must not come back without an expiry.
if redis.call('EXISTS', worker_key(ARGV[2])) == 0 then return 0 end
redis.call('HSET', worker_key(ARGV[2]), 'state', ARGV[3])
return 1
