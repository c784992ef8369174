/* Binds libc's and libm's functions to versions that every glibc since 2.17 has, so that a library built here opens on old systems.
 *
 * Given to the compiler with -include. A name that a file does not use leaves no trace in its object. */
#if defined(__linux__) && !defined(TS_ANY_GLIBC)
#if defined(__x86_64__)
#define TS_OLD(name, version) __asm__(".symver " #name "," #name "@GLIBC_" version);
#elif defined(__aarch64__)
#define TS_OLD(name, version) __asm__(".symver " #name "," #name "@GLIBC_2.17");
#else
#define TS_OLD(name, version)
#endif
TS_OLD(dlopen, "2.2.5")
TS_OLD(dlsym, "2.2.5")
TS_OLD(dlclose, "2.2.5")
TS_OLD(dlerror, "2.2.5")
TS_OLD(dladdr, "2.2.5")
TS_OLD(pthread_create, "2.2.5")
TS_OLD(pthread_join, "2.2.5")
TS_OLD(pthread_detach, "2.2.5")
TS_OLD(pthread_once, "2.2.5")
TS_OLD(pthread_mutex_trylock, "2.2.5")
TS_OLD(pthread_key_create, "2.2.5")
TS_OLD(pthread_getspecific, "2.2.5")
TS_OLD(pthread_setspecific, "2.2.5")
TS_OLD(pthread_attr_setstacksize, "2.2.5")
TS_OLD(pthread_sigmask, "2.2.5")
TS_OLD(pthread_condattr_setclock, "2.3.3")
TS_OLD(sem_wait, "2.2.5")
TS_OLD(sem_post, "2.2.5")
TS_OLD(exp, "2.2.5")
TS_OLD(log, "2.2.5")
TS_OLD(pow, "2.2.5")
TS_OLD(exp2, "2.2.5")
TS_OLD(log2, "2.2.5")
TS_OLD(expf, "2.2.5")
TS_OLD(logf, "2.2.5")
TS_OLD(powf, "2.2.5")
TS_OLD(exp2f, "2.2.5")
TS_OLD(log2f, "2.2.5")
TS_OLD(fmod, "2.2.5")
TS_OLD(fmodf, "2.2.5")
TS_OLD(pthread_setaffinity_np, "2.3.4")
TS_OLD(pthread_getaffinity_np, "2.3.4")
#endif
