/* Ends a process in which no Python thread runs any more: one that waits for ever holds the interpreter's lock. */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static atomic_int seconds_left; /* 0: does not count */
static int signal_before;
static char last_words[1024];

static void *count(void *unused) {
    (void)unused;
    const struct timespec second = {.tv_sec = 1};
    for (;;) {
        nanosleep(&second, NULL);
        int left = atomic_load(&seconds_left);
        while (left > 0 && !atomic_compare_exchange_weak(&seconds_left, &left, left - 1)) {
        }
        if (left == 1) {
            raise(signal_before);
            dprintf(STDERR_FILENO, "%s\n", last_words); /* whoever waits may hold the lock of stderr, too */
            _exit(1);
        }
    }
}

/* Start counting, once in a process: at the end this thread raises a signal, whose handler may write what Python's
 * threads are doing, prints some words and exits with 1. Does nothing if there can be no thread. */
void start_countdown(int signal_number, const char *words) {
    signal_before = signal_number;
    snprintf(last_words, sizeof last_words, "%s", words);
    static bool started;
    if (started)
        return;
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, signal_number);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* which the thread inherits: other signals are for Python's */
    pthread_t thread;
    started = !pthread_create(&thread, NULL, count, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started)
        pthread_detach(thread);
}

/* Count from so many seconds; 0 ends it. Only seconds in which this process runs count: it may have been suspended. */
void set_countdown(int seconds) { atomic_store(&seconds_left, seconds); }
