-- How many leading blocks have a live holder. ARGV: keys.
-- Returns runs: a number of blocks, then the claims of all their live holders, 7 bytes each (epoch, tier and codec).
local alive = {}
local function live_claims(value)
  if #value % CLAIM ~= 0 then return '' end
  local found = {}
  for claim = 1, #value, CLAIM do
    local epoch = sub(value, claim, claim + 5)
    if alive[epoch] == nil then alive[epoch] = is_alive(epoch) or false end
    if alive[epoch] and expiry(value, claim) > seconds then found[#found + 1] = sub(value, claim, claim + 6) end
  end
  return table.concat(found)
end

local runs, length, holders, last = {}, 0, '', nil
each(block, ARGV[1], function(_, _, value)
  if not value then return false end
  -- Blocks that were published together have equal values: one look at the first does for all.
  if value ~= last then
    local now = live_claims(value)
    if now == '' then return false end
    if now ~= holders then
      if length > 0 then runs[#runs + 1] = length; runs[#runs + 1] = holders end
      length, holders = 0, now
    end
    last = value
  end
  length = length + 1
end)
if length > 0 then runs[#runs + 1] = length; runs[#runs + 1] = holders end
return runs
