/* The wall clock of a process, set off by the nanoseconds in the file that CLOCK_STEP_FILE names (LD_PRELOAD).

   Clocks that only go forward, such as CLOCK_MONOTONIC, stay what they are, as when an operator sets the clock. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t SECOND = 1000000000;
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static const volatile int64_t *step;

__attribute__((constructor)) static void prepare(void) {
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("CLOCK_STEP_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) {
        return;
    }
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) {
        step = mapped;
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (real_clock_gettime == NULL) {
        prepare();
    }
    int status = real_clock_gettime(clock, now);
    if (status == 0 && step != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t total = now->tv_sec * SECOND + now->tv_nsec + *step;
        now->tv_sec = total / SECOND;
        now->tv_nsec = total % SECOND;
    }
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    int status = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return status;
}

time_t time(time_t *result) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (result != NULL) {
        *result = exact.tv_sec;
    }
    return exact.tv_sec;
}
