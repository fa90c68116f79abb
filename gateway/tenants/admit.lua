-- Admits requests to a key and its team at once, or to neither.
-- KEYS: of each scope the window, the slots (a sorted set: slot -> when it expires), what was spent, and which of it is
--       reserved (a sorted set: "<slot> <day> <nano-dollars>" -> when it expires).
-- ARGV: the number of scopes; requests wanted, of which fewer may be granted; 1 for misses, 0 for hits; of each miss its
--       tokens, nano-dollars and slot, to which a number from 1 is added, and the milliseconds until slots and
--       reservations expire; the turn and the number of this call; five limits of each scope; then slots to free.
-- A call may come twice, if the reply to the first was late: it counts once. A turn's calls have rising numbers.
-- Returns 0, the second, the day, how many requests are granted, and of each scope its requests, tokens, and
-- nano-dollars of day and month; or the number of the scope that refuses, its limit, milliseconds until that can change,
-- and what is used.
local count, granted, is_miss = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1'
local tokens, dollars, slot, lease = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local turn, call = 'turn:' .. ARGV[8], tonumber(ARGV[9])
local BEFORE = 9
local scopes = scopes_of(count, BEFORE)

-- A process may be granted several misses of a key: a part of what is left of each limit, but none of its last tenth (of
-- slots, of the last half). What it does not use is refused to others until it comes back.
local LEASED, PART = 0.9, 100
local LEASED_SLOTS, PART_OF_SLOTS = 0.5, 8
local function grant(left, amount)
  granted = math.max(1, math.min(granted, math.floor(left / amount)))
end

local last = redis.call('HGET', scopes[1].window, turn)
if last then
  local number, second, day, permits = last:match('^(%d+) (%d+) (%d+) (%d+)$')
  if tonumber(number) >= call then
    local reply = {0, tonumber(second), tonumber(day), tonumber(permits)}
    for _, scope in ipairs(scopes) do
      local sums = redis.call('HMGET', scope.window, 'rsum', 'tsum')
      local spent = redis.call('HMGET', scope.spent, 'day_sum', 'month_sum')
      for _, used in ipairs({sums[1], sums[2], spent[1], spent[2]}) do
        reply[#reply + 1] = tonumber(used) or 0
      end
    end
    return reply
  end
end

for number, scope in ipairs(scopes) do
  local limits = scope.limits
  scope.requests, scope.tokens, scope.day, scope.month = 0, 0, 0, 0
  if limits[REQUESTS] >= 0 then
    scope.requests = window_sum(scope.window, 'r')
    local free = limits[REQUESTS] - scope.requests
    if free < 1 then
      return {number, REQUESTS, window_wait(scope.window, 'r', 1 - free), scope.requests}
    end
    if is_miss then
      grant((LEASED * limits[REQUESTS] - scope.requests) / PART, 1)
    end
    granted = math.min(granted, free)
  end
  if is_miss and limits[TOKENS] >= 0 then
    scope.tokens = window_sum(scope.window, 't')
    -- A request that alone needs more than there is in a minute gets a whole minute.
    scope.needed = math.min(tokens, limits[TOKENS])
    local lacking = scope.tokens + scope.needed - limits[TOKENS]
    if lacking > 0 then
      return {number, TOKENS, window_wait(scope.window, 't', lacking), scope.tokens}
    end
    grant((LEASED * limits[TOKENS] - scope.tokens) / PART, tokens)
  end
  if is_miss and limits[SLOTS] >= 0 then
    for freed = BEFORE + count * LIMITS_OF_SCOPE + 1, #ARGV do
      redis.call('ZREM', scope.slots, ARGV[freed])
    end
    redis.call('ZREMRANGEBYSCORE', scope.slots, '-inf', now_ms)
    local running = redis.call('ZCARD', scope.slots)
    if running >= limits[SLOTS] then
      return {number, SLOTS, 1000, running}
    end
    grant((LEASED_SLOTS * limits[SLOTS] - running) / PART_OF_SLOTS, 1)
  end
  if is_miss and scope.has_budget then
    scope.day, scope.month = spent_sums(scope)
    if limits[DAY] >= 0 and (scope.day >= limits[DAY] or scope.day + dollars > limits[DAY]) then
      return {number, DAY, ((today + 1) * 86400 - now) * 1000, scope.day}
    end
    if limits[MONTH] >= 0 and (scope.month >= limits[MONTH] or scope.month + dollars > limits[MONTH]) then
      local next_month = today + 1
      while month_of(next_month) == this_month do
        next_month = next_month + 1
      end
      return {number, MONTH, (next_month * 86400 - now) * 1000, scope.month}
    end
    if limits[DAY] >= 0 then
      grant((LEASED * limits[DAY] - scope.day) / PART, dollars)
    end
    if limits[MONTH] >= 0 then
      grant((LEASED * limits[MONTH] - scope.month) / PART, dollars)
    end
  end
end

local reply = {0, now, today, granted}
for _, scope in ipairs(scopes) do
  if scope.limits[REQUESTS] >= 0 then
    scope.requests = window_add(scope.window, 'r', granted)
  end
  if scope.needed then
    scope.tokens = window_add(scope.window, 't', scope.needed * granted)
  end
  if is_miss and scope.limits[SLOTS] >= 0 then
    for each = 1, granted do
      redis.call('ZADD', scope.slots, now_ms + lease, slot .. '.' .. each)
    end
    redis.call('PEXPIRE', scope.slots, lease)
  end
  if is_miss and scope.has_budget then
    scope.day = redis.call('HINCRBY', scope.spent, 'day_sum', dollars * granted)
    scope.month = redis.call('HINCRBY', scope.spent, 'month_sum', dollars * granted)
    if dollars > 0 then
      for each = 1, granted do
        local reserved = string.format('%s.%d %d %s', slot, each, today, ARGV[5])
        redis.call('ZADD', scope.reserved, now_ms + lease, reserved)
      end
    end
  end
  for _, used in ipairs({scope.requests, scope.tokens, scope.day, scope.month}) do
    reply[#reply + 1] = used
  end
end
redis.call('HSET', scopes[1].window, turn, string.format('%d %d %d %d', call, now, today, granted))
redis.call('EXPIRE', scopes[1].window, KEPT_SECONDS)
return reply
