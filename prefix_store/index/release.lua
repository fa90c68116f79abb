-- A reader is done. What has expired is not there any more, and what others hold stays. ARGV: id, keys.
local id = ARGV[1]
each(lease, ARGV[2], function(_, name, records)
  if not records then return end
  local kept = {}
  for record = 1, #records, LEASE do
    if sub(records, record, record + 7) ~= id then kept[#kept + 1] = sub(records, record, record + LEASE - 1) end
  end
  if #kept == 0 then
    redis.call('DEL', name)
  elseif #kept * LEASE < #records then
    redis.call('SET', name, table.concat(kept), 'KEEPTTL')
  end
end)
return 1
