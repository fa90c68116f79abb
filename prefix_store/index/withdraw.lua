-- An owner gives blocks up, tails first. ARGV: epoch, '1' to do so even if somebody reads them, keys.
-- Returns the numbers, from 0, of those that it has to keep because they are leased from it.
local epoch, forced, keys = ARGV[1], ARGV[2] == '1', ARGV[3]
local leased = {}
if not forced then
  each(lease, keys, function(number, _, records)
    if records and #records % LEASE == 0 then
      for record = 1, #records, LEASE do
        local from, ends = sub(records, record + 8, record + 13), struct.unpack('>I6', records, record + 14)
        if from == epoch and ends > milliseconds then leased[number] = true end
      end
    end
  end)
end
local kept = {}
each(block, keys, function(number, name, value)
  local claim = claim_of(value, epoch)
  if not claim then return end
  if leased[number] then
    kept[#kept + 1] = number - 1
  elseif #value == CLAIM then
    redis.call('DEL', name)
  else
    set_claims(name, sub(value, 1, claim - 1) .. sub(value, claim + CLAIM))
  end
end)
return kept
