/* A wall clock that is set while a program runs: LD_PRELOAD of this, and CLOCK_SHIFT names a file with a long, in
 * seconds, which is added to the time that the program sees. Monotonic clocks go on, as when an administrator sets the
 * time. Waits until a moment of the wall clock end when that clock says so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *file;

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("CLOCK_SHIFT");
	int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	void *found = MAP_FAILED;

	if (descriptor >= 0) {
		found = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, descriptor, 0);
		close(descriptor);
	}
	if (found != MAP_FAILED)
		file = found;
}

static long shift(void)
{
	return file ? *file : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	int failed = syscall(SYS_clock_gettime, clock, now);

	if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
		now->tv_sec += shift();
	return failed;
}

time_t time(time_t *into)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	if (into)
		*into = now.tv_sec;
	return now.tv_sec;
}

int gettimeofday(struct timeval *restrict into, void *restrict zone)
{
	struct timespec now;

	(void)zone;
	clock_gettime(CLOCK_REALTIME, &now);
	into->tv_sec = now.tv_sec;
	into->tv_usec = now.tv_nsec / 1000;
	return 0;
}

int pthread_cond_timedwait(pthread_cond_t *restrict news, pthread_mutex_t *restrict lock,
			   const struct timespec *restrict until)
{
	static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
	struct timespec then = *until;

	if (!real)
		*(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
	then.tv_sec -= shift();
	return real(news, lock, &then);
}
