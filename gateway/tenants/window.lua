-- What the scripts of limits share: the time, sliding windows, days and months. Time is Redis' own.
local clock = redis.call('TIME')
local now, micros = tonumber(clock[1]), tonumber(clock[2])
local now_ms = now * 1000 + math.floor(micros / 1000)

-- Buckets of a second each. This many count, with the present one, so that the 60 seconds before any moment do.
local BUCKETS = 61
local KEPT_SECONDS = 70
-- The limits of a scope, -1 for none, in the order of its arguments.
local REQUESTS, TOKENS, SLOTS, DAY, MONTH = 1, 2, 3, 4, 5
local KEYS_OF_SCOPE, LIMITS_OF_SCOPE = 4, 5

-- A window is a hash: <name>sum, the bucket <name>first from which on there may be some, and <name><second>.

-- The sum of a window, once buckets that no longer count are gone.
local function window_sum(key, name)
  local stored = redis.call('HMGET', key, name .. 'sum', name .. 'first')
  local sum, first = tonumber(stored[1]), tonumber(stored[2])
  if not sum then
    return 0
  end
  local last = now - BUCKETS
  if first > now then
    redis.call('DEL', key)  -- the clock of Redis was set
    return 0
  end
  if last - first > 2 * KEPT_SECONDS then
    -- Nothing was counted for so long, or the clock was set. What was is within a window from the first.
    local stale = {name .. 'sum', name .. 'first'}
    for second = first, first + BUCKETS do
      stale[#stale + 1] = name .. second
    end
    redis.call('HDEL', key, unpack(stale))
    return 0
  end
  if first > last then
    return sum
  end
  local ended = {}
  for second = first, last do
    ended[#ended + 1] = name .. second
  end
  for _, count in ipairs(redis.call('HMGET', key, unpack(ended))) do
    sum = sum - (tonumber(count) or 0)
  end
  redis.call('HDEL', key, unpack(ended))
  redis.call('HSET', key, name .. 'sum', sum, name .. 'first', last + 1)
  return sum
end

-- Counts `amount` in the present bucket; window_sum() comes first.
local function window_add(key, name, amount)
  redis.call('HSETNX', key, name .. 'first', now)
  redis.call('HINCRBY', key, name .. now, amount)
  redis.call('EXPIRE', key, KEPT_SECONDS)
  return redis.call('HINCRBY', key, name .. 'sum', amount)
end

-- Takes up to `amount` back from the bucket of `second`, if it still counts; window_sum() comes first.
local function window_return(key, name, second, amount)
  local back = math.min(amount, tonumber(redis.call('HGET', key, name .. second)) or 0)
  if back > 0 then
    redis.call('HINCRBY', key, name .. second, -back)
    redis.call('HINCRBY', key, name .. 'sum', -back)
  end
end

-- Milliseconds until buckets with at least `amount` in all will have left the window.
local function window_wait(key, name, amount)
  local names = {}
  for second = now - BUCKETS + 1, now do
    names[#names + 1] = name .. second
  end
  for number, count in ipairs(redis.call('HMGET', key, unpack(names))) do
    amount = amount - (tonumber(count) or 0)
    if amount <= 0 then
      return number * 1000 - math.floor(micros / 1000)
    end
  end
  return BUCKETS * 1000
end

-- The month of a day since 1970, as 12 * year + month (Howard Hinnant, chrono-compatible low-level date algorithms).
local function month_of(day)
  local shifted = day + 719468
  local era = math.floor(shifted / 146097)
  local day_of_era = shifted - era * 146097
  local year_of_era = math.floor((day_of_era - math.floor(day_of_era / 1460) + math.floor(day_of_era / 36524)
    - math.floor(day_of_era / 146096)) / 365)
  local day_of_year = day_of_era - (365 * year_of_era + math.floor(year_of_era / 4) - math.floor(year_of_era / 100))
  local from_march = math.floor((5 * day_of_year + 2) / 153)
  local month = from_march < 10 and from_march + 3 or from_march - 9
  local year = year_of_era + era * 400 + (month <= 2 and 1 or 0)
  return 12 * year + month
end

local today = math.floor(now / 86400)
local this_month = month_of(today)

-- Adds to what was spent of a scope an amount reserved, "<slot> <day> <nano-dollars>"; `sign` -1 takes it back. An
-- earlier day's or month's ended with that.
local function add_reserved(scope, reserved, sign)
  local day, amount = reserved:match('(%d+) (%d+)$')
  day, amount = tonumber(day), sign * tonumber(amount)
  if day == today then
    redis.call('HINCRBY', scope.spent, 'day_sum', amount)
  end
  if month_of(day) == this_month then
    redis.call('HINCRBY', scope.spent, 'month_sum', amount)
  end
end

-- What was spent of a scope today and this month, in nano-dollars, with what is reserved. A new day begins with nothing
-- but the month's sum. Amounts that their worker has not renewed in time are taken back: it has died.
local function spent_sums(scope)
  local stored = redis.call('HMGET', scope.spent, 'day', 'month', 'month_sum')
  if tonumber(stored[1]) ~= today then
    local month_sum = tonumber(stored[2]) == this_month and tonumber(stored[3]) or 0
    redis.call('DEL', scope.spent)
    redis.call('HSET', scope.spent, 'day', today, 'day_sum', 0, 'month', this_month, 'month_sum', month_sum)
  end
  for _, reserved in ipairs(redis.call('ZRANGEBYSCORE', scope.reserved, '-inf', now_ms)) do
    add_reserved(scope, reserved, -1)
  end
  redis.call('ZREMRANGEBYSCORE', scope.reserved, '-inf', now_ms)
  local sums = redis.call('HMGET', scope.spent, 'day_sum', 'month_sum')
  return tonumber(sums[1]), tonumber(sums[2])
end

-- The scopes of a call, a key's and its team's, from KEYS and from ARGV after `before` arguments.
local function scopes_of(count, before)
  local scopes = {}
  for number = 1, count do
    local at = (number - 1) * KEYS_OF_SCOPE
    local scope = {limits = {}}
    scope.window, scope.slots, scope.spent, scope.reserved = unpack(KEYS, at + 1, at + KEYS_OF_SCOPE)
    for limit = 1, LIMITS_OF_SCOPE do
      scope.limits[limit] = tonumber(ARGV[before + (number - 1) * LIMITS_OF_SCOPE + limit])
    end
    scope.has_budget = scope.limits[DAY] >= 0 or scope.limits[MONTH] >= 0
    scopes[number] = scope
  end
  return scopes
end
