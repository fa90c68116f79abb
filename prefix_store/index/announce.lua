-- An owner is alive, and wants to know which epoch it has.
-- ARGV: name, epoch that it believes to have (6 bytes, or '' for none), instance (8 bytes), '1' if its content outlives
-- processes, ms for which it counts as alive, ms after which the registry forgets it, details.
-- Returns its epoch, or '' where another instance has taken its name over.
local name, epoch, instance, lasting = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local known = redis.call('HGET', owners, name)
if known and (lasting or sub(known, 13, 20) == instance) and epoch ~= 'new' then
  epoch = sub(known, 1, 6)
elseif known and #epoch == 6 then
  return ''
else
  -- A restart, or a registry that knows nothing of the owner: nothing that was said before is believed.
  -- The time in it makes epochs grow even where Redis has lost everything.
  local last = redis.call('HGET', owners, '')
  local number = math.max(milliseconds, last and struct.unpack('>I6', last) + 1 or 0)
  epoch = struct.pack('>I6', number)
  redis.call('HSET', owners, '', epoch)
  if known then redis.call('ZREM', live, sub(known, 1, 6)) end
end
local ends, forgets = milliseconds + tonumber(ARGV[5]), tonumber(ARGV[6])
redis.call('HSET', owners, name, epoch .. struct.pack('>I6', ends) .. instance .. ARGV[7])
redis.call('ZADD', live, ends, epoch)
redis.call('PEXPIRE', owners, forgets)
redis.call('PEXPIRE', live, forgets)
return epoch
