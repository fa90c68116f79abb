-- Who is alive, and for how long: names, then epoch, until when and details in one. ARGV: ms after which one that is
-- dead is forgotten. Returns all that count as alive, with their names.
local found = {}
local known = redis.call('HGETALL', owners)
for i = 1, #known, 2 do
  local name, value = known[i], known[i + 1]
  if name ~= '' then
    local ends = struct.unpack('>I6', value, 7)
    if ends > milliseconds then
      found[#found + 1] = name
      found[#found + 1] = value
    elseif ends + tonumber(ARGV[1]) < milliseconds then
      redis.call('HDEL', owners, name)
      redis.call('ZREM', live, sub(value, 1, 6))
    end
  end
end
return found
