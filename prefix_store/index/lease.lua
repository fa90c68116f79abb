-- Somebody is about to read blocks from an owner, which is not to give them up meanwhile.
-- ARGV: epoch of the owner, id of the lease (8 bytes), milliseconds, keys, parents first.
-- Returns for how many leading blocks it holds. A lease made again is prolonged.
local epoch, id, keys = ARGV[1], ARGV[2], ARGV[4]
if not is_alive(epoch) then return 0 end
local own = id .. epoch .. struct.pack('>I6', milliseconds + tonumber(ARGV[3]))
local claimed = 0
each(block, keys, function(number, _, value)
  local claim = claim_of(value, epoch)
  if not claim or expiry(value, claim) <= seconds then return false end
  claimed = number
end)
each(lease, sub(keys, 1, claimed * KEY), function(_, name, records)
  local kept, last = {}, milliseconds + tonumber(ARGV[3])
  if records and #records % LEASE == 0 then
    for record = 1, #records, LEASE do
      local ends = struct.unpack('>I6', records, record + 14)
      local same = sub(records, record, record + 13) == id .. epoch
      if not same and ends > milliseconds then
        kept[#kept + 1] = sub(records, record, record + LEASE - 1)
        last = math.max(last, ends)
      end
    end
  end
  kept[#kept + 1] = own
  redis.call('SET', name, table.concat(kept), 'PXAT', string.format('%.0f', last))
end)
return claimed
