-- An owner gives blocks up, tails first. ARGV: epoch, '1' to do so even if somebody reads them, keys.
-- Returns the numbers, from 0, of those that it has to keep because they are leased from it.
local epoch, forced, keys = ARGV[1], ARGV[2] == '1', ARGV[3]
local leased = {}
if not forced then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', lease .. epoch, '(' .. milliseconds, '+inf')) do
    local held = redis.call('GET', lease .. epoch .. id) or ''
    for first = 1, #held, KEY do leased[sub(held, first, first + KEY - 1)] = true end
  end
end
local kept = {}
each(block, keys, function(number, name, value)
  local claim = claim_of(value, epoch)
  if not claim then return end
  if leased[sub(name, -KEY)] then
    kept[#kept + 1] = number - 1
  elseif #value == CLAIM then
    redis.call('DEL', name)
  else
    set_claims(name, sub(value, 1, claim - 1) .. sub(value, claim + CLAIM))
  end
end)
return kept
