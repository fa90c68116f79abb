-- Somebody is about to read blocks from an owner, which is not to give them up meanwhile.
-- ARGV: epoch of the owner, id of the lease (8 bytes), milliseconds, keys, parents first.
-- Returns for how many leading blocks it holds. A lease made again begins again, for what is there now.
local epoch, id, keys = ARGV[1], ARGV[2], ARGV[4]
if not is_alive(epoch) then return 0 end
local claimed = 0
each(block, keys, function(number, _, value)
  local claim = claim_of(value, epoch)
  if not claim or expiry(value, claim) <= seconds then return false end
  claimed = number
end)
if claimed == 0 then return 0 end
local leases, ends = lease .. epoch, milliseconds + tonumber(ARGV[3])
redis.call('SET', leases .. id, sub(keys, 1, claimed * KEY), 'PXAT', string.format('%.0f', ends))
redis.call('ZADD', leases, ends, id)
redis.call('ZREMRANGEBYSCORE', leases, '-inf', milliseconds)
redis.call('PEXPIREAT', leases, redis.call('ZRANGE', leases, -1, -1, 'WITHSCORES')[2])
return claimed
