-- KEYS: a secret's digest, the records of keys, the teams. Returns the record, its team's limits, and when the secret
-- expires in Unix milliseconds, 0 for never; or nothing.
local stored = redis.call('GET', KEYS[1])
local id, expires = (stored or ''):match('^(%S+) (%d+)$')
local record = id and redis.call('HGET', KEYS[2], id)
if not record then
  return {}
end
local key = cjson.decode(record).key
expires = tonumber(expires)
-- A former secret may have been given longer than the key has now.
if key.expires ~= cjson.null and (expires == 0 or key.expires * 1000 < expires) then
  expires = math.max(1, math.floor(key.expires * 1000))
end
local clock = redis.call('TIME')
if expires ~= 0 and tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) >= expires then
  return {}
end
return {record, key.team ~= '' and redis.call('HGET', KEYS[3], key.team) or '', expires}
