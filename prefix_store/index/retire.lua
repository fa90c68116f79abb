-- An owner goes: nothing that it said is believed any more. ARGV: name, epoch.
local known = redis.call('HGET', owners, ARGV[1])
if known and sub(known, 1, 6) == ARGV[2] then redis.call('HDEL', owners, ARGV[1]) end
return redis.call('ZREM', live, ARGV[2])
