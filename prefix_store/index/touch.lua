-- Blocks of an owner were used: what it claims goes on counting. Claims nothing new. ARGV: epoch, seconds, keys.
-- Returns how many of them it claims.
local epoch, lasts = ARGV[1], tonumber(ARGV[2])
local ends, found = seconds + 1 + lasts, 0
each(ARGV[3], function(name, value)
  local claim = claim_of(value, epoch)
  if not claim then return end
  found = found + 1
  -- What was touched a moment ago is not written again.
  if expiry(value, claim) <= ends - lasts / 4 then
    set_claims(name, sub(value, 1, claim + 6) .. struct.pack('>I4', ends) .. sub(value, claim + CLAIM))
  end
end)
return found
