-- A reader is done. What has ended is not there any more, and what others hold stays. ARGV: epoch of the owner, id.
redis.call('DEL', lease .. ARGV[1] .. ARGV[2])
return redis.call('ZREM', lease .. ARGV[1], ARGV[2])
