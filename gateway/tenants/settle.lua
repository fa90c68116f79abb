-- Replaces reservations by what requests really used, renews those of requests that still run, frees and renews slots,
-- and takes unused permits back.
-- KEYS: as of admit.lua. ARGV: the number of scopes, a batch as JSON, the worker, the number of its batch, the
-- milliseconds until slots and reservations expire, and five limits of each scope.
-- A batch may come twice, if the reply to the first was lost: it counts once.
local count, batch = tonumber(ARGV[1]), cjson.decode(ARGV[2])
local sender, number, lease = 'worker:' .. ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])

-- Whether a scope has heard of this batch, as the hash at `key` says.
local function is_known(key)
  if (tonumber(redis.call('HGET', key, sender)) or 0) >= number then
    return true
  end
  redis.call('HSET', key, sender, number)
  return false
end

-- What an answer needed beyond its reservation counts from now on; what it did not need goes back to where it was taken.
local function settle_tokens(scope)
  window_sum(scope.window, 't')
  for _, each in ipairs(batch.tokens) do
    local second, reserved, used = each[1], math.min(each[2], scope.limits[TOKENS]), each[3]
    if used > reserved then
      window_add(scope.window, 't', used - reserved)
    else
      window_return(scope.window, 't', second, reserved - used)
    end
  end
end

-- An answer counts on the day on which it ends. A reservation that has expired meanwhile is made again by its renewal.
local function settle_money(scope)
  spent_sums(scope)
  if is_known(scope.spent) then
    return
  end
  for _, reserved in ipairs(batch.held) do
    if redis.call('ZADD', scope.reserved, now_ms + lease, reserved) == 1 then
      add_reserved(scope, reserved, 1)
    end
  end
  local spent = batch.unreserved
  for _, each in ipairs(batch.money) do
    local reserved, used = each[1], each[2]
    if redis.call('ZREM', scope.reserved, reserved) == 1 then
      add_reserved(scope, reserved, -1)
    end
    spent = spent + used
  end
  redis.call('HINCRBY', scope.spent, 'day_sum', spent)
  redis.call('HINCRBY', scope.spent, 'month_sum', spent)
end

for _, scope in ipairs(scopes_of(count, 5)) do
  local permits = scope.limits[REQUESTS] >= 0 and #batch.permits > 0
  local tokens = scope.limits[TOKENS] >= 0 and #batch.tokens > 0
  if (permits or tokens) and not is_known(scope.window) then
    redis.call('EXPIRE', scope.window, KEPT_SECONDS)
    if permits then
      window_sum(scope.window, 'r')
      for _, each in ipairs(batch.permits) do
        window_return(scope.window, 'r', each[1], each[2])
      end
    end
    if tokens then
      settle_tokens(scope)
    end
  end
  if scope.limits[SLOTS] >= 0 then
    for _, slot in ipairs(batch.renewed) do
      redis.call('ZADD', scope.slots, now_ms + lease, slot)
      redis.call('PEXPIRE', scope.slots, lease)
    end
    for _, slot in ipairs(batch.freed) do
      redis.call('ZREM', scope.slots, slot)
    end
  end
  if scope.has_budget and (#batch.money > 0 or #batch.held > 0 or batch.unreserved > 0) then
    settle_money(scope)
  end
end
