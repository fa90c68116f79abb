-- Replaces the record of a key, if it is still as it was read, with its secrets and its claim to a name.
-- KEYS: the records of keys, their names, the version, then digests of secrets.
-- ARGV: id, the record as it was read ("" for none), the new record, its name, "claim", "free" or "keep" for it, the new
-- version, then for each secret when it expires, in Unix milliseconds: 0 for never, -1 to remove it.
-- Returns 1, 0 if the record was changed meanwhile, or -1 if another key has the name.
local id, read, name, claim = ARGV[1], ARGV[2], ARGV[4], ARGV[5]
if (redis.call('HGET', KEYS[1], id) or '') ~= read then
  return 0
end
if claim == 'claim' and redis.call('HSETNX', KEYS[2], name, id) == 0 then
  return -1
end
if claim == 'free' then
  redis.call('HDEL', KEYS[2], name)
end
redis.call('HSET', KEYS[1], id, ARGV[3])
for number = 4, #KEYS do
  local expires = ARGV[number + 3]
  if expires == '-1' then
    redis.call('DEL', KEYS[number])
  else
    redis.call('SET', KEYS[number], id .. ' ' .. expires)
  end
end
redis.call('SET', KEYS[3], ARGV[6])
return 1
