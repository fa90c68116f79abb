-- An owner holds these blocks. ARGV: epoch, tier and codec (1 byte), seconds, keys.
-- Returns 0 and changes nothing where the registry does not know the epoch, else 1.
local epoch, kind, keys = ARGV[1], ARGV[2], ARGV[4]
if not redis.call('ZSCORE', live, epoch) then return 0 end
local ends = seconds + 1 + tonumber(ARGV[3]) -- the second that has begun is not counted
local own = epoch .. kind .. struct.pack('>I4', ends)

-- The first claim of an owner that is dead; the oldest where all are alive.
local function least_wanted(claims)
  for i = 1, #claims do
    if not is_alive(sub(claims[i], 1, 6)) then return i end
  end
  return 1
end

each(keys, function(name, value)
  if not value or #value % CLAIM ~= 0 then
    redis.call('SET', name, own, 'EXAT', ends)
    return
  end
  local claims = {}
  for claim = 1, #value, CLAIM do
    if sub(value, claim, claim + 5) ~= epoch and expiry(value, claim) > seconds then
      claims[#claims + 1] = sub(value, claim, claim + CLAIM - 1)
    end
  end
  if #claims == MAX_CLAIMS then table.remove(claims, least_wanted(claims)) end
  claims[#claims + 1] = own
  set_claims(name, table.concat(claims))
end)
return 1
