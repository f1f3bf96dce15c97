-- name: due_schedule
SELECT name, state, problem FROM schedules WHERE wake <= $1 ORDER BY wake LIMIT 1 FOR UPDATE SKIP LOCKED;

-- name: next_schedule
SELECT min(wake) - clock_ms() FROM schedules;

-- name: hold_schedule
SELECT state, problem FROM schedules WHERE name = $1 FOR UPDATE;

-- name: select_schedule
SELECT state, problem FROM schedules WHERE name = $1;

-- name: list_schedules
SELECT name, state, problem FROM (
    SELECT name, state, problem, sum(length(state)) OVER (ORDER BY name) - length(state) AS before FROM (
        SELECT name, state, problem FROM schedules WHERE name > $1 ORDER BY name LIMIT $2
    ) page
) rows WHERE before <= $3 ORDER BY name;

-- name: count_schedules
SELECT count(*) AS kept, count(problem) AS failing FROM schedules;

-- name: next_incarnation
SELECT nextval('schedule_incarnations');

-- name: upsert_schedule
INSERT INTO schedules (name, state, wake, problem) VALUES ($1, $2, $3, $4)
ON CONFLICT (name) DO UPDATE SET state = excluded.state, wake = excluded.wake, problem = excluded.problem;

-- name: delete_schedule
DELETE FROM schedules WHERE name = $1;

-- name: last_firing
SELECT greatest(p.answered_below - 1, p.forgotten_below - 1, (
    SELECT max(seq) FROM sequences s WHERE s.topic = p.topic AND s.producer = p.name AND s.epoch = p.epoch
)) FROM producers p WHERE p.topic = $1 AND p.name = $2;
