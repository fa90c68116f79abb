-- KEYS: a secret's digest, the records of keys, the teams. Returns the record and its team's limits, or nothing.
local stored = redis.call('GET', KEYS[1])
local id, expires = (stored or ''):match('^(%S+) (%d+)$')
if not id then
  return {}
end
local clock = redis.call('TIME')
if expires ~= '0' and tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) >= tonumber(expires) then
  return {}
end
local record = redis.call('HGET', KEYS[2], id)
if not record then
  return {}
end
local team = cjson.decode(record).key.team
return {record, team ~= '' and redis.call('HGET', KEYS[3], team) or ''}
