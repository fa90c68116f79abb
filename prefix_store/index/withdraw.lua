-- An owner gives blocks up. ARGV: epoch, keys.
local epoch = ARGV[1]
each(ARGV[2], function(name, value)
  local claim = claim_of(value, epoch)
  if not claim then return end
  if #value == CLAIM then
    redis.call('DEL', name)
  else
    set_claims(name, sub(value, 1, claim - 1) .. sub(value, claim + CLAIM))
  end
end)
